-- Runs beeond_directives.lua: script on stdin, on stdout its directives, or what is wrong with them; the
-- site's limits in the file of that name, if there is one.
local bb = dofile(arg[1])
local script = io.read("*a")
if arg[2] == "directives" then
	io.write(table.concat(bb.directives(script), "\n"))
else
	local limits = nil
	if arg[2] then
		local file = assert(io.open(arg[2], "rb"))
		limits = bb.read_limits(file:read("*a"))
		limits.pool = arg[3]
		file:close()
	end
	io.write(bb.check_script(script, limits) or "")
end
