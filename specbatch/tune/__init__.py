"""The arithmetic of `specbatch tune`: replay of traced drafts, a cost model, prediction of a file's time, search. numpy
only: tracing, measuring and confirming on the real engine are its callers'.
"""
