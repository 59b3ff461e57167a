from commkern.benchmarks.link import *
