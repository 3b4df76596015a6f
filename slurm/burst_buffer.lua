-- Burst-buffer hooks of beeond-ctl, for BurstBufferType=burst_buffer/lua; belongs beside slurm.conf, on the hosts of
-- slurmctld, and beeond_directives.lua beside it.
--
-- The work is done where it is for --beeond: in Prolog and Epilog, which hold the nodes. Here, directives are refused
-- at the prompt (slurm_bb_job_process: the grammar of beeond_ctl/directives.py, the site's limits, and their words),
-- jobs are marked for their Prologs and sources are looked at (slurm_bb_setup, slurm_bb_data_in), and the outcome is
-- told to Slurm (slurm_bb_data_out). docs/burst-buffer.md has the states, and what is cleaned by whom.
--
-- Slurm forks for each hook of each job, and loads this script anew: it is to be short, and start few processes.
-- Written for Lua 5.1 to 5.4. Which one Slurm has was decided when it was built.

local CONTROLLER = "/usr/bin/beeond-ctl"
-- How much all nodes' devices hold together, in bytes: what jobs with capacity=SIZE pool=beeond are scheduled by.
local POOL_FILE = "/etc/beeond-ctl/pool"
-- What has to be known here of the site's configuration: what `beeond-ctl bb limits` prints.
local LIMITS_FILE = "/etc/beeond-ctl/limits"

-- Where this script is, and slurm.conf.
local HERE = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"

-- What knows directives, sizes and limits.
local function grammar()
	return dofile(HERE .. "beeond_directives.lua")
end

local function read_file(path)
	local file = io.open(path, "rb")
	if not file then return nil end
	local text = file:read("*a")
	file:close()
	return text
end

-- One of the limits that are a word and a value.
local function limit(name, default)
	local line = "\n" .. name:gsub("%-", "%%-") .. " ([^\n]*)"
	return ("\n" .. (read_file(LIMITS_FILE) or "")):match(line) or default
end

-- What a command of the shell said, and whether it succeeded. Nothing of a user's may stand in it: a user's text only
-- ever passes through variables of the shell.
local function shell(command)
	local pipe = io.popen("( " .. command .. "\n) 2>&1 </dev/null; echo \"exit $?\"")
	if not pipe then return "cannot start a shell", false end
	local output = pipe:read("*a")
	pipe:close()
	local text, code = output:match("^(.-)%s*exit (%d+)%s*$")
	return text or output, code == "0"
end

local function quote(text)
	return "'" .. text:gsub("'", "'\\''") .. "'"
end

-- `script` with {name} replaced by the value of that name: what is of the site is quoted by whoever gives it.
local function fill(script, values)
	return (script:gsub("{(%l+)}", values))
end

-- Slurm's own state: the directory that is SlurmUser's. Nothing where slurm.conf does not name it: in the path of a
-- job's script it stands only if no line of that has patterns such as %j.
local known
local function state()
	if known == nil then
		local conf = "\n" .. (read_file(HERE .. "slurm.conf") or "")
		local _, at = conf:lower():find("\n%s*statesavelocation%s*=%s*")
		known = at and conf:match("^/[^%s#]*", at + 1) or false
	end
	return known
end

-- Hooks of many jobs run at once, and slurmctld is to answer others meanwhile: those that start processes come behind
-- it, and take turns. A turn is a lock on a directory of Slurm's own state, and ends with whoever holds it. Where
-- nothing can be locked, nobody waits. `late` is what to do before `command`, after a wait that may have ended without
-- a turn. (Not `( ... ) 9<directory`: dash 0.5.12 forgets that within other redirections.)
local TURN_S = 60
local function in_turn(directory, late, command)
	local turn = ("exec 9<%s; flock -w %d 9 2>/dev/null; "):format(quote(directory), TURN_S)
	return turn .. late .. " exec nice -n 19 " .. command
end

-- Marks: the comment of a job ends in the word that its Prolog looks for, which is all that Slurm 22.05 lets its own
-- user tell nodes. slurm_bb_setup writes down that a job is to be marked, in an empty file in Slurm's own state;
-- slurm_bb_data_in marks it, and all others that are written down by then, so that of many jobs few start a process.
-- What is to be marked and has ended, or is unknown to Slurm for a day, is forgotten by whoever marks next.
local function to_be_marked(job_id)
	local directory = state()
	return directory and directory .. "/beeond-mark." .. job_id
end

-- One job. The comment is the user's text, and stays in a variable. An array's id alone would mean all of its jobs.
local MARK_ONE = [[
name=$(squeue -h -j {job} -o '%A %F_%K' | sed -n 's/^{job} //p')
case $name in
'') echo 'Slurm no longer knows the job'; exit 1 ;;
*_ | *_*[!0-9]*) name={job} ;;
esac
comment=$(squeue -h -j "$name" -o %k) || exit
case $comment in
*beeond:directives*) exit 0 ;;
'(null)') comment= ;;
esac
exec scontrol update "JobId=$name" "Comment=${comment:+$comment }beeond:directives"]]

-- All that wait, but those with a comment of their own. What Slurm says of a job holds its user's text, which may look
-- like a line of another job's: one of which two different lines are seen is left to its own hook. So is one whose line
-- ends before its directives, which come after its comment: later releases than 22.05 show the words of sbatch before
-- both, line breaks and all. The id of an array is answered with all of its jobs. A job's name is made of its own id.
local MARK_ALL = [[
cd {state} || exit
jobs=
for file in beeond-mark.*; do jobs="$jobs ${file#*.}"; done
found=$(for job in $jobs; do echo "show job $job"; done | scontrol -o 2>/dev/null | awk -v jobs="$jobs" '
	{ sub(/^scontrol: /, "") }
	/^JobId=[0-9]+ / {
		job = substr($1, 7)
		if (line[job] != $0) seen[job]++
		line[job] = $0
		array[job] = $2 == "ArrayJobId=" job && $3 ~ /^ArrayTaskId=[0-9]+$/ ? "_" substr($3, 13) : ""
		pending[job] = / JobState=PENDING .* BurstBuffer=#BB_LUA/
		ended[job] = / JobState=(CANCELLED|COMPLETED|FAILED|TIMEOUT|DEADLINE|REVOKED) /
		marked[job] = / Comment=.*beeond:directives/
	}
	/ Comment=/ { commented[job] = 1 }
	END {
		count = split(jobs, all, " ")
		for (i = 1; i <= count; i++) {
			job = all[i]
			if (!seen[job]) unknown = unknown " " job
			else if (seen[job] == 1 && (marked[job] || ended[job])) over = over " " job
			else if (seen[job] == 1 && pending[job] && !commented[job]) {
				names = names (names == "" ? "" : ",") job array[job]
				markable = markable " " job
			}
		}
		print names; print markable; print over; print unknown
	}')
{ read -r names; read -r markable; read -r over; read -r unknown; } <<END
$found
END
if [ -n "$names" ] && scontrol update "JobId=$names" Comment=beeond:directives >/dev/null 2>&1; then
	over="$over $markable"
fi
set --
for job in $unknown; do set -- "$@" "beeond-mark.$job"; done
[ $# -eq 0 ] || find "$@" -mtime +0 -delete 2>/dev/null
set --
for job in $over; do set -- "$@" "beeond-mark.$job"; done
[ $# -eq 0 ] || rm -f "$@"
[ -e beeond-mark.{job} ] || exit 0
rm -f beeond-mark.{job}
]]

local function mark(job_id, waiting)
	local values = { job = job_id, path = limit("path", "/usr/bin:/opt/slurm/bin:/usr/local/bin") }
	if not waiting then
		return shell("nice -n 19 sh -c " .. quote(fill("PATH={path}:$PATH\n" .. MARK_ONE, values)))
	end
	values.state = quote(state())
	local script = fill("PATH={path}:$PATH\n" .. MARK_ALL .. MARK_ONE, values)
	return shell(in_turn(state(), "[ -e " .. quote(waiting) .. " ] || exit 0;", "sh -c " .. quote(script)))
end

-- As the job's user, where the site lets us: SlurmUser seldom sees what users do.
local LOOKING = [[
PATH={path}:$PATH
uid=$(squeue -h -j {job} -o '%A %U' | sed -n 's/^{job} //p')
case $uid in
'' | 0 | *[!0-9]*) echo 'Slurm no longer knows the job'; exit 1 ;;
esac
command -v sudo >/dev/null || { echo 'sudo: not found'; exit 1; }
exec sudo -n -u "#$uid" -- {controller} bb data_in {job}]]

-- Two at a time, or one, where that would leave no core. Who does not get a turn in time is not looked for.
local function look(job_id, as_user)
	local command = CONTROLLER .. " bb data_in " .. job_id
	if as_user then
		local values = { job = job_id, path = limit("path", "/usr/bin"), controller = CONTROLLER }
		command = "sh -c " .. quote(fill(LOOKING, values))
	end
	local turn = state()
	if not turn then return shell("nice -n 19 " .. command) end
	local _, cores = (read_file("/proc/stat") or ""):gsub("\ncpu%d", "")
	local own = ("%s/hash.%d"):format(turn, cores > 2 and job_id % 2 or 0)
	local file = io.open(own)
	if file then
		file:close()
		turn = own
	end
	return shell(in_turn(turn, "[ $? -ne 1 ] || { echo 'too many jobs at once'; exit 0; };", command))
end

local function failed(hook, job_id, text)
	-- It may come from a process of the job's user.
	local line = text:gsub("^beeond%-ctl: ", ""):gsub("%c+", " "):sub(1, 1000)
	slurm.log_error("beeond: %s of job %s: %s", hook, tostring(job_id), line)
	return slurm.ERROR, line
end

local function is_job(job_id)
	return tostring(job_id):match("^%d+$") ~= nil
end

-- Whether the job's script has such a directive; `unknown` where it cannot be read.
local function has(directive, job_script, unknown)
	local script = read_file(job_script)
	if not script then return unknown end
	if not script:find(directive, 1, true) then return false end
	local _, names = grammar().check_script(script)
	return names[directive] ~= nil
end

-- Within slurmctld, which waits: nothing but a few small files is looked at.
function slurm_bb_job_process(job_script)
	local script = read_file(job_script)
	if not script then return slurm.ERROR, "the job's script cannot be read by slurmctld" end
	local fine, ours = pcall(grammar)
	if not fine then
		return slurm.ERROR, "burst_buffer.lua: " .. tostring(ours) .. "; this is for the cluster's administrator to mend"
	end
	local limits = ours.read_limits(read_file(LIMITS_FILE))
	if limits.wrong then
		slurm.log_error("beeond: %s: no rule can be made of '%s'; run `beeond-ctl bb limits >%s`",
			LIMITS_FILE, limits.wrong:sub(1, 200), LIMITS_FILE)
	end
	limits.pool = (read_file(POOL_FILE) or ""):match("^%s*(.-)%s*$")
	local wrong = ours.check_script(script, limits)
	if wrong then return slurm.ERROR, wrong end
	return slurm.SUCCESS
end

function slurm_bb_pools()
	local text = read_file(POOL_FILE)
	local bytes = text and grammar().size(text) or 2 ^ 50
	if bytes < 2 ^ 20 then bytes = 2 ^ 50 end -- a number without its unit
	-- In units of the granularity (Slurm 22.05).
	local units = ("%.0f"):format(math.floor(bytes / 2 ^ 20))
	return slurm.SUCCESS, '{"pools":[{"id":"beeond","quantity":' .. units .. ',"granularity":1048576}]}'
end

-- Later releases than 22.05 (seen on 25.11) link an array's script into the directory of only one of its tasks, and
-- make none for the others. slurm_bb_paths is to write there: they would be held. So it is done here, as 22.05 does it.
-- Slurm removes it with the job.
local function make_directory_of_task(job_id, info)
	local array = info and tonumber(info.array_job_id) or 0
	if array == 0 or array == tonumber(job_id) or not state() then return end
	local function directory(id)
		return ("%s/hash.%d/job.%d"):format(state(), id % 10, id)
	end
	local own = directory(tonumber(job_id))
	local file = io.open(own .. "/script")
	if file then
		file:close()
		return
	end
	local script = quote(directory(array) .. "/script")
	local text, done = shell(("mkdir -p -m 700 %s && ln %s %s"):format(quote(own), script, quote(own)))
	if not done then failed("setup", job_id, text) end
end

-- The job is pending, and has no nodes yet: it is to be marked for its Prologs.
function slurm_bb_setup(job_id, _, _, _, _, _, info)
	if not is_job(job_id) then return failed("setup", job_id, "burst_buffer.lua: no job id") end
	make_directory_of_task(job_id, info)
	local path = to_be_marked(job_id)
	local file = path and io.open(path, "w")
	if file then
		file:close()
		return slurm.SUCCESS
	end
	local text, done = mark(job_id)
	if not done then return failed("setup", job_id, "the job cannot be marked for its nodes: " .. text) end
	return slurm.SUCCESS
end

-- There are no nodes to copy to yet: the Prolog does that. What can be found to be wrong with sources is found now, and
-- holds the job; where it cannot be looked for, the Prolog finds it.
function slurm_bb_data_in(job_id, job_script)
	if not is_job(job_id) then return failed("data_in", job_id, "burst_buffer.lua: no job id") end
	local path = to_be_marked(job_id)
	local file = path and io.open(path)
	if file then
		file:close()
		local text, done = mark(job_id, path)
		if not done then
			os.remove(path)
			return failed("data_in", job_id, "the job cannot be marked for its nodes: " .. text)
		end
	end
	if not has("stage_in", job_script, false) then return slurm.SUCCESS end
	local as_user = limit("as-user") == "yes"
	local text, done = look(job_id, as_user)
	if not done and as_user and text:match("^sudo: ") then
		failed("data_in", job_id, "sources were not looked at as the job's user (see burst-buffer.md, step 6): " .. text)
		text, done = look(job_id, false)
	end
	if not done and text:match("^beeond%-ctl: [^u]") then return failed("data_in", job_id, text) end
	if text ~= "" then failed("data_in", job_id, "sources were not looked at: " .. text) end
	return slurm.SUCCESS
end

-- Releases that have this hook ask it until the answer is not "BUSY" (slurm_bb_data_in may then return early).
function slurm_bb_test_data_in()
	return slurm.SUCCESS, ""
end

function slurm_bb_real_size()
	return slurm.SUCCESS
end

-- Within slurmctld, which waits. Steps know by this variable that an instance was promised to them.
function slurm_bb_paths(job_id, _, path_file)
	local file = io.open(path_file, "w")
	if not file then return failed("paths", job_id, "cannot write " .. path_file) end
	file:write("BEEOND_ASKED=" .. job_id .. "\n")
	file:close()
	return slurm.SUCCESS
end

-- Nothing may be left on a node here: a job that is cancelled now runs neither Prolog nor Epilog.
function slurm_bb_pre_run()
	return slurm.SUCCESS
end

function slurm_bb_post_run()
	return slurm.SUCCESS
end

-- The Epilogs stage out, and hold the nodes for it. Wait for them, and tell Slurm what became of it.
function slurm_bb_data_out(job_id, job_script)
	if not has("stage_out", job_script, true) then return slurm.SUCCESS end
	if not is_job(job_id) then return failed("data_out", job_id, "burst_buffer.lua: no job id") end
	local text, done = shell("nice -n 19 " .. CONTROLLER .. " bb data_out " .. job_id)
	if not done then return failed("data_out", job_id, text) end
	return slurm.SUCCESS
end

function slurm_bb_test_data_out()
	return slurm.SUCCESS, ""
end

-- Nothing of a job is kept here but that it is to be marked. What is on nodes is their Epilogs' to remove; they may be
-- another job's by now. Of `hurry` (`scancel --hurry`) the Epilogs learn from Slurm itself. The less is done here
-- the better: Slurm 22.05 may kill this hook when a pending job is cancelled, and does not give its capacity back then.
function slurm_bb_job_teardown(job_id)
	local path = is_job(job_id) and to_be_marked(job_id)
	if path then os.remove(path) end
	return slurm.SUCCESS
end

function slurm_bb_get_status()
	return slurm.SUCCESS, "beeond: on the job's nodes `beeond-ctl status` shows more\n"
end
