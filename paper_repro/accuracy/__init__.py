"""Table F: test accuracy of sampling and noise mechanisms at equal ε, `python -m paper_repro F`.

Unlike the other tables it measures what a training learns and not what a step costs, on real data that packages ship:
scikit-learn's digits (it ships no other set of images) and Python's documentation; CIFAR-10 as well, if a folder holds
it.
"""
