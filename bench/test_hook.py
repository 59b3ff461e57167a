from commkern.benchmarks.hook import *
