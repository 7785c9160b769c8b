"""One rank: requests in, results out. Imports no Ray."""
