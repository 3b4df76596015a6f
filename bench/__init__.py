"""Measurements beside peers, in one run on one machine: `python -m bench [PART ...]`.

A part is a module here with a function `rows() -> list[Row]`; `bench.__main__` lists them.
"""
