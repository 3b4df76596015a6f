-- Runs beeond_directives.lua: script on stdin, on stdout its directives, or what is wrong with them; the
-- site's limits in the file of that name, if there is one. With "seconds", how much CPU time that took.
local bb = dofile(arg[1])
local script = io.read("*a")
local timed = arg[2] == "seconds"
if timed then table.remove(arg, 2) end
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
	local began = os.clock()
	local wrong = bb.check_script(script, limits)
	io.write(timed and tostring(os.clock() - began) or wrong or "")
end
