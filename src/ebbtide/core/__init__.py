"""Pure logic: requests, blocks, groups, the scheduler. No torch, no I/O, no clock, no thread."""
