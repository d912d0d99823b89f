"""Every strategy of the engine against one-sample autograd, over the shared table of cases."""
