"""Work for idle time: compiling ahead and checks against exact prefill."""
