"""The numbers of the sources of chains: the row's own text, the outputs of the job, a file of earlier results, and a
draft network. A *forecast* is what is known of a network's chain before its first draft is drawn."""

ROW, JOB, CORPUS, NETWORK, FORECAST = range(5)
# These take the place of tokens that the choice of a chain may not read. No draft equals either.
UNKNOWN, OF_NETWORK = -1, -2
