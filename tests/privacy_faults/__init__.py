"""What is left behind when something fails: nothing that is released uncounted, nothing that the next step sees."""
