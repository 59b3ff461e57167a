"""Benchmarks, run by ``commkern bench`` or by pytest. Each checks its answer first.

``extra_info`` of every benchmark: ``nbytes``, the bytes of the data that one round
handles, and ``ratios``, our time over that of a peer or a roof in the same run.
"""
