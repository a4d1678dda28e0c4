"""The ranks of a run: starting them (launch), agreeing and failing together (peers, places), moving tensors between them (groups)."""
