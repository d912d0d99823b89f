"""What makes a Trainer of transformers private, part by part; `ghostclip.integrations.transformers` puts it together.

`arguments` what is asked for, `refusals` which options contradict it, `collation` whether a collator keeps records
apart, `logical` the batches, `record_losses` the loss of each record.
"""
