"""Rules: the form each operation's factors take, what they cost, and rules that users register."""
