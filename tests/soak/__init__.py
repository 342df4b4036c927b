"""Long runs of random conversations against a whole stack, checked text by text: `python -m tests.soak --help`."""
