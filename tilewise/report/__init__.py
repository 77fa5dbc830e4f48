"""What people look at: measurements, tables and figures for the command line. Nothing here is needed to compute.

Only this package and `tilewise.cli` import matplotlib and rich.
"""
