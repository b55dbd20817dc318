"""The benchmarks: stock autocast, ours, casts by hand and no autocast side by side.

    make bench                                       # or: python -m benchmarks, in an environment with the package
    make bench ARGS="--suite models --case 'MLP*'"
    make bench ARGS="--suite programs --device cuda-stand-in"
    make bench ARGS="--suite compile"                # ten minutes
    make bench-instructions                          # python -m benchmarks --suite instructions; needs valgrind

The suites:

    region        constructs, enters and leaves a region; one object; a decorated function; nested
    ops           calls with nothing to cast, activations to cast, cached weights, each cast policy
    models        an MLP of many small layers, a Llama-like stack, an LSTM, a conv net: forward, training, evaluation
    caches        the modes of the cast cache on such models
    programs      these modes in programs: accumulation, checkpoints, LoRA, EMA, evaluation, generation
    compile       training steps compiled by torch.compile on the CPU
    float8        compiled steps of a Llama-like block in float8; stock is ours in bfloat16, or torchao's float8
    instructions  instructions of calls, models and compiled steps, under valgrind: a quarter of an hour

The last three run only if you name them. The contenders of a case share one process:

    stock         under PyTorch's torch.autocast, also while `install` is in force
    ours          under my_autocast
    already_cast  no region, and inputs that need no cast; for models, weights, and the input is cast
    plain         no region and no cast: float32, unless there is nothing to cast

The JSON of `--json`. Times are nanoseconds per run; a spread is an object of `median`, `low` and `high`, the last two
its quartiles over the rounds. Compare only ratios of one run.

    torch, torch_promote   versions
    device, device_name    "cpu" or "cuda", and its model
    threads, rounds        the settings
    clock                  "cpu": CPU time of the process; "wall": wall-clock time; "kernels": no times, counts on the
                           stand-in device
    default_policy         the default policy of ours and where it comes from, or "" for PyTorch's
    interrupted            whether Ctrl-C ended the run before the last case
    results                a list with an object for each case:
      suite, case          the names
      ratio                spread of ours / stock
      overheads            by base, a contender: spread of (ours - base) / (stock - base); null if noise
      times_ns             by contender: spread of the time
      casts                by contender: casts in a step, of weights, activations and gradients, one for each tensor
      peak_bytes           by contender: peak memory of a step, above the memory held before it. On CUDA: of two runs in
                           a region, above the memory held before the region
      kernels              by contender, on CUDA: kernels in a run, after a first one in the same region. On a GPU,
                           torch.profiler counts them, without copies and fills of memory. On the stand-in device, each
                           call of an op that computes counts as one kernel, also for an op of lists
      moved_bytes          by contender, on the stand-in device: bytes that the casts of this run read and write
      compiled             by contender, suite compile: kernels that Inductor generates, graphs, graph_breaks, frames
                           that Dynamo compiles, guards of all frames
      instructions         by contender, suite instructions: instructions in a run; nothing else is there then
"""
