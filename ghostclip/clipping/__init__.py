"""From factors to clipped sums: norms, the one clip factor, policies and the strategies.

A backward hands factors to passes.py, alone or joined (joint.py); norms.py makes the samples' norms of them,
decisions.py the clip factors, by a policy and its bounds (policies.py, bounds.py), and store.py adds the clipped sums
up. strategies.py chooses one pass or two; loss.py and loss_scale.py find by what a loss scales its samples.
"""
