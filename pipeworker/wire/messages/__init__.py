"""The messages between a worker and the coordinator: typed, frozen, plain values only.

A module has what is said of one thing, in both directions; `directions` says who sends what. What a
message may hold is what the codec can check: whole numbers, floats, strings, bytes, booleans,
enums, tuples of these, optional values and other messages.
"""
