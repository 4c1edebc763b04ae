"""The timeline of a run: its workers record their actions, and reports explain them."""
