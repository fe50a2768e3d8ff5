"""The benchmark of every op: time, bytes, FLOPs, and percent of the roof. `python -m
quickturn_kernels.bench --help`.
"""
