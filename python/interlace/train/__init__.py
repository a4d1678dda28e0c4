"""From a program to steps: interlace.compile (compile.py) makes a Trainer (trainer.py), which holds a Run (run.py) and its parts."""
