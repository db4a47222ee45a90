"""Questions whose answer stands far back in the context: items, how systems answer them, and what is reported."""
