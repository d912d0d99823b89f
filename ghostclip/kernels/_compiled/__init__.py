"""The kernels themselves: the only modules that import Triton, loaded when one is first used."""
