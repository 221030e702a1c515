"""For all tiers."""

import signal

# A shell starts background jobs deaf to SIGINT, and so is everything that they start; a person's terminal is not.
# Tests that interrupt a process must find the same in both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
