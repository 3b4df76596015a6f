"""How an instance is brought up, torn down and recovered on a node. `docs/lifecycle.md` is the design."""
