"""Programs for whoever works on the project; no part of what is installed."""
