from commkern.benchmarks.peers import *
