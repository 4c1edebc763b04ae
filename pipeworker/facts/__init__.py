"""Domain types: facts that the processes of a job exchange and record. Pure.

Each type checks its own ranges when it is made, and therefore also when it is read from a message.
"""
