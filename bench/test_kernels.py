from commkern.benchmarks.kernels import *
