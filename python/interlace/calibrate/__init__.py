"""Measured runs of other machines against predictions, and the few constants of a cluster that explain them."""
