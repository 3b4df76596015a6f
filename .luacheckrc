-- `luacheck slurm`: what of Slurm's is there when burst_buffer.lua runs.
std = "min"
max_line_length = 120
read_globals = { "slurm" }
files["slurm/burst_buffer.lua"] = { allow_defined_top = true, ignore = { "131" } }
files["tests/vectors/check.lua"] = { read_globals = { "arg" } }
