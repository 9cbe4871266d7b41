"""The tests lie in folders that mirror the package: tests/engine tests specbatch/engine.

Other folders:
    oracle/     a second engine, slow and plain: its tokens, counts and bits are what the engine's are compared with
    repo/       what concerns the whole repository: imports, docs, scripts/, packaging
    fixtures/   files that tests read

What they share:
    conftest.py         Triton's interpreter where there is no GPU; one thread for each process
    kernels/trace_marks.py            slow_on_cpu: a case that only a GPU or `-m slow` runs
    tiny_models.py      random models of a few layers, engines over them, prompts
    tiny_checkpoint.py  such a model as files on disk
    stub_engine.py      no model at all: the command line and the file job over made-up tokens
    processes.py        commands as forked processes, for kill -9, signals and exit codes
    eagle_reference.py, tracing.py, coins.py, fake_flashinfer.py
                        EAGLE heads in plain torch; a trace of drafts; all outcomes of random draws; FlashInfer in torch
    kernels/fake_gpu.py Triton's compiler for an H100, without one: launches are only counted

`pytest` runs what takes seconds on two cores. `-m slow` is real weights and minutes of CPU, `-m gpu` needs a GPU;
without one, kernels run in Triton's interpreter (kernels/interpreter.py), on shapes as small as their edges allow.
"""
