-- Runs burst_buffer.lua without Slurm: script on stdin, on stdout its directives, or what is wrong with them.
local bb = dofile(arg[1])
local script = io.read("*a")
if arg[2] == "directives" then
	io.write(table.concat(bb.directives(script), "\n"))
else
	io.write(bb.check_script(script) or "")
end
