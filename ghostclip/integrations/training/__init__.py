"""What makes a Trainer of transformers private, part by part; `ghostclip.integrations.transformers` puts it together.

`arguments` what is asked for, `refusals` which options contradict it, `logical` the batches, `record_losses` the loss
of each record.
"""
