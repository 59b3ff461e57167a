from commkern.benchmarks.all_reduce import *
