"""Which schedule, Ulysses degree, and chunks of heads a call takes, by reckoned time."""
