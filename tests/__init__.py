"""The tests lie in folders that mirror the package: tests/engine tests specbatch/engine.

Other folders:
    oracle/     a second engine, slow and plain: tests compare its tokens, counts and bits with the engine's
    repo/       tests of the whole repository: imports, docs, scripts/, packaging
    fixtures/   files that tests read

Shared modules:
    conftest.py         Triton's interpreter where there is no GPU; one thread for each process
    marks.py            slow_on_cpu: a case that only a GPU or `-m slow` runs
    tiny_models.py      random models of a few layers, engines over them, prompts
    tiny_checkpoint.py  such a model as files on disk
    stub_engine.py      no model at all: the command line and the file job over invented tokens
    processes.py        commands as forked processes, for kill -9, signals and exit codes
    eagle_reference.py, tracing.py, coins.py, fake_flashinfer.py
                        EAGLE heads in plain torch; a trace of drafts; all outcomes of random draws; FlashInfer in torch
    kernels/fake_gpu.py Triton's compiler for an H100, without one: launches are only counted

`pytest` runs tests that take seconds on two cores. `-m slow` needs real weights and minutes of CPU, and `-m gpu` a GPU.
Without a GPU, kernels run in Triton's interpreter (kernels/interpreter.py), on shapes as small as their edges allow.
"""
