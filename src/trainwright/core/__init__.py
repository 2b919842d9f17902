"""Records, durations, errors, argument checks, devices, random states, and trees of tensors.

Everything else imports this package; it imports none of the others.
"""
