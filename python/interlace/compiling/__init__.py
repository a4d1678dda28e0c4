"""From a model to a program that can run: capturing it or finding it in the cache, the passes, the executor and where its values lie."""
