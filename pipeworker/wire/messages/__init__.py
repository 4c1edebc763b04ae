"""Messages between workers and the coordinator, by subject: typed, frozen, of plain values.

:mod:`.directions` lists which side sends which. A field may have any type that the codec checks:
int, float, str, bytes, bool, enums, tuples of these, optional values and other dataclasses.
"""
