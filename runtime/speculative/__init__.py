"""The speculative cycle: proposals, acceptance, sampling, policies, counters."""
