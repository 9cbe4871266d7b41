"""Many workers for one file job: a pool that hands rows to processes on this machine or on a cluster."""
