"""Measurements: `python -m bench` runs the cases of this machine and writes bench/results/<device>.csv."""
