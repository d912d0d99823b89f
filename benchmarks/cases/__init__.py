"""Every case of the tests in every strategy, as a table: what is exact, by how much, and what is refused."""
