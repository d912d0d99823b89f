"""Language models of transformers: what they predict, the loss of each record, and heads without logits.

Nothing of transformers is imported when this is loaded.
"""
