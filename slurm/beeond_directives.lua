-- What users write for beeond-ctl in #BB_LUA lines: the grammar of beeond_ctl/directives.py, with the same words of
-- refusal, and the site's limits. burst_buffer.lua loads it from beside itself, and only where it is needed: Slurm
-- loads that script anew for each hook of each job.
--
--     #BB_LUA beeond    [KEY=VALUE ...]
--     #BB_LUA stage_in  source=PATH destination=PATH [flags=FLAG[+FLAG]]
--     #BB_LUA stage_out source=PATH destination=PATH [flags=FLAG[+FLAG]]
--
-- Pure: knows texts alone. Written for Lua 5.1 to 5.4.

local DIRECTIVE = "#BB_LUA"

-- Words that messages list, in the order in which they do. --------------------------------------------------------

local DIRECTIVES = { "beeond", "stage_in", "stage_out" }
local STAGE_KEYS = { "source", "destination", "flags", "type" }
local FLAGS = { "delete", "metadata-only", "update" }
local KEYS = {
	"backend", "meta", "storage", "stripe-count", "stripe-dirs", "chunk-size", "capacity", "mirror", "prefer-local",
	"interfaces", "mount", "share", "join",
}
local METAVAR = {
	["backend"] = "NAME", ["meta"] = "N|all", ["storage"] = "N|all", ["stripe-count"] = "N",
	["stripe-dirs"] = "N[+N]", ["chunk-size"] = "SIZE", ["capacity"] = "SIZE", ["mirror"] = "yes|no",
	["prefer-local"] = "yes|no", ["interfaces"] = "IF[+IF]", ["mount"] = "PATH", ["share"] = "N[+N]",
	["join"] = "N",
}
local MOST_BYTES, MOST_TRANSFERS = 64 * 1024, 256
local LONGEST_NAME, LONGEST_PATH, SHOWN = 255, 4095, 500
local DIRECTORIES = "name directories instead of single files"
local SAME = { type = "scratch", access_mode = "striped" }
local INSIDE = { "$BEEOND", "${BEEOND}", "$DW_JOB_STRIPED", "${DW_JOB_STRIPED}" }

local function has(list, word)
	for _, item in ipairs(list) do
		if item == word then return true end
	end
	return false
end

-- A refusal is an error with a table, so that it cannot be taken for a fault of this script.
local function refuse(text)
	error({ refusal = text }, 0)
end

-- Text in messages: as Python's repr() has it. ---------------------------------------------------------------------

-- Length of the character of UTF-8 at `i`, and its code point; 1 and nil where there is none.
local function character(text, i)
	local a = text:byte(i)
	if a < 0x80 then return 1, a end
	local size = a >= 0xF0 and a <= 0xF4 and 4 or a >= 0xE0 and a < 0xF0 and 3 or a >= 0xC2 and a < 0xE0 and 2 or 0
	if size == 0 or i + size - 1 > #text then return 1, nil end
	local code = a % (size == 2 and 0x20 or size == 3 and 0x10 or 0x08)
	for k = i + 1, i + size - 1 do
		local b = text:byte(k)
		if b < 0x80 or b > 0xBF then return 1, nil end
		code = code * 0x40 + b % 0x40
	end
	local least = size == 2 and 0x80 or size == 3 and 0x800 or 0x10000
	if code < least or code > 0x10FFFF or (code >= 0xD800 and code <= 0xDFFF) then return 1, nil end
	return size, code
end

-- Characters that would not be seen, or would change how others are.
local function hidden(code)
	return code < 0x20 or (code >= 0x7F and code <= 0xA0) or code == 0xAD or (code >= 0x2000 and code <= 0x200F)
		or (code >= 0x2028 and code <= 0x202F) or (code >= 0x205F and code <= 0x206F) or code == 0x3000
		or code == 0xFEFF or (code >= 0xE000 and code <= 0xF8FF)
end

local SHORT = { [9] = "\\t", [10] = "\\n", [13] = "\\r", [92] = "\\\\" }

-- The beginning of `text`, where it is too long for a message.
local function shortened(text)
	local i = 1
	for _ = 1, SHOWN do
		if i > #text then return text end
		i = i + character(text, i)
	end
	return i > #text and text or text:sub(1, i - 1) .. "…"
end

local function quoted(whole, invalid)
	local text = shortened(whole)
	local quote = text:find("'", 1, true) and not text:find('"', 1, true) and '"' or "'"
	local out, i = {}, 1
	while i <= #text do
		local size, code = character(text, i)
		if code == nil then
			out[#out + 1] = invalid:format(text:byte(i))
		elseif SHORT[code] then
			out[#out + 1] = SHORT[code]
		elseif hidden(code) then
			out[#out + 1] = (code < 0x100 and "\\x%02x" or "\\u%04x"):format(code)
		elseif text:sub(i, i) == quote then
			out[#out + 1] = "\\" .. quote
		else
			out[#out + 1] = text:sub(i, i + size - 1)
		end
		i = i + size
	end
	return quote .. table.concat(out) .. quote
end

local function show(text)
	return quoted(text, "\\\\x%02x")
end

-- Values of `beeond`: nil where they are right, else what would be. ------------------------------------------------

local function count(text)
	if not (text:match("^[1-9]%d*$") and #text <= 6) then return "want a number from 1 to 999999" end
end

local POWER = { k = 1, m = 2, g = 3, t = 4, p = 5 }

local function size(text)
	local digits, unit = text:match("^%s*(%d+)(%a*)%s*$")
	unit = unit and unit:lower()
	local power = unit and POWER[unit:sub(1, 1)] or 0
	local plain = unit == "" or unit == "b"
	local known = unit and (plain or (power > 0 and (unit:match("^%ab?$") or unit:match("^%aib$"))))
	local bytes = known and tonumber(digits) * 1024 ^ power or 0
	-- Lua 5.1 has no integers of 64 bits: what it cannot tell from 8 EiB is compared as text.
	local fits = bytes < 2 ^ 63 or (power == 0 and #digits == 19 and digits <= "9223372036854775807")
	if #(digits or "") > 19 or bytes == 0 or not fits then
		return nil, quoted(text, "\\udc%02x") .. " is not a size such as 512KiB, 1MiB or 2TiB"
	end
	return bytes
end

local function climbs(path)
	return ("/" .. path .. "/"):find("/../", 1, true) ~= nil
end

-- Refuses what looks like a shell's: in a line of a script it stays as it is, and names something else.
local function check_replaced(where, path)
	local index = 0
	for part in (path .. "/"):gmatch("([^/]*)/") do
		if part:match("^%$[%a_{]") or (index == 0 and part:sub(1, 1) == "~") then
			refuse(where .. "no shell replaces " .. show(part) .. " in " .. show(path)
				.. "; write the path out, within $BEEOND relative to it")
		end
		index = index + 1
	end
end

local CHECK = {}
CHECK["backend"] = function(text)
	if not (text:match("^[a-z][a-z0-9-]*$") and #text <= 32) then return "want a name of lower-case letters" end
end
CHECK["meta"] = function(text)
	if text ~= "all" and count(text) then return "want a number of nodes or 'all'" end
end
CHECK["storage"] = CHECK["meta"]
CHECK["stripe-count"] = count
CHECK["stripe-dirs"] = function(text)
	local parts, wrong = 0, false
	for part in (text .. "+"):gmatch("([^+]*)%+") do
		parts = parts + 1
		wrong = wrong or not part:match("^[1-9]%d?%d?$")
	end
	if wrong or parts > 16 then return "want at most 16 numbers from 1 to 999, joined by '+', such as 1+8" end
end
CHECK["chunk-size"] = function(text)
	local bytes, wrong = size(text)
	if wrong then return wrong end
	local odd = bytes
	while odd % 2 == 0 do odd = odd / 2 end
	if bytes < 65536 or bytes > 2 ^ 31 or odd ~= 1 then return "want a power of two from 64KiB to 2GiB, such as 1MiB" end
end
CHECK["capacity"] = function(text)
	local bytes, wrong = size(text)
	if wrong then return wrong end
	if bytes < 2 ^ 20 then return "want at least 1MiB, with its unit, such as 2TiB" end
end
CHECK["mirror"] = function(text)
	if not has({ "yes", "true", "1", "", "no", "false", "0" }, text) then return "want yes or no" end
end
CHECK["prefer-local"] = CHECK["mirror"]
CHECK["interfaces"] = function(text)
	for part in (text .. "+"):gmatch("([^+]*)%+") do
		if #part > 15 or not part:match("^[A-Za-z0-9_.-]+$") then
			return "want names of network interfaces joined by '+', such as ib0+ib1"
		end
	end
end
CHECK["mount"] = function(text)
	if text:sub(1, 1) ~= "/" or climbs(text) then return "want an absolute path without '..'" end
end

local function component(text)
	return text == "0" or text:match("^[1-9]%d?%d?$")
end
CHECK["share"] = function(text)
	for part in (text .. "+"):gmatch("([^+]*)%+") do
		if not component(part) then
			return "want numbers of components of this job, from 0 on, joined by '+', such as 1+2"
		end
	end
end
CHECK["join"] = function(text)
	if not component(text) then return "want the number of a component of this job, from 0 on" end
end

-- The grammar. -----------------------------------------------------------------------------------------------------

-- Words between blanks; `\ ` is a blank within a word, `\\` a backslash.
local function split_words(text)
	local words, word, started, i = {}, {}, false, 1
	while i <= #text do
		local char = text:sub(i, i)
		if char == "\\" then
			local following = text:sub(i + 1, i + 1)
			local plain = following == " " or following == "\t" or following == "\\"
			word[#word + 1] = plain and following or char .. following
			started = true
			i = i + 1
		elseif char == " " or char == "\t" then
			if started then words[#words + 1] = table.concat(word) end
			word, started = {}, false
		else
			word[#word + 1] = char
			started = true
		end
		i = i + 1
	end
	if started then words[#words + 1] = table.concat(word) end
	return words
end

-- Name and value of `name=value`; no value where there is no `=`.
local function partition(word)
	local at = word:find("=", 1, true)
	if at then return word:sub(1, at - 1), word:sub(at + 1) end
	return word, nil
end

-- Checks a line of `beeond`, and adds its values to `asked`, which later lines overrule.
local function check_beeond(words, asked)
	local where = DIRECTIVE .. " beeond: "
	local kept = {}
	for _, word in ipairs(words) do
		local name, value = partition(word)
		if SAME[name] then
			if value ~= SAME[name] then
				refuse(where .. name .. "=" .. show(value or "") .. " is not offered; an instance is always "
					.. name .. "=" .. SAME[name])
			end
		elseif name ~= "pool" then -- Slurm's, which has checked it
			kept[#kept + 1] = word
		end
	end
	for _, word in ipairs(kept) do
		local name, value = partition(word)
		if not CHECK[name] then
			refuse(where .. "unknown key " .. show(name) .. "; the keys are " .. table.concat(KEYS, ", "))
		end
		if not value and name ~= "mirror" then
			refuse(where .. name .. " has no value; write " .. name .. "=" .. METAVAR[name])
		end
		local wrong = CHECK[name](value or "")
		if wrong then
			refuse(where .. name .. "=" .. show(value or "") .. " is not valid: " .. wrong)
		end
		asked[name] = value or ""
	end
end

local function below(path)
	for _, prefix in ipairs(INSIDE) do
		if path == prefix then return "." end
		if path:sub(1, #prefix + 1) == prefix .. "/" then
			local rest = path:sub(#prefix + 1):gsub("^/+", "")
			return rest == "" and "." or rest
		end
	end
	return path
end

local function escape(text)
	return (text:gsub("[\\:,]", "\\%0"))
end

-- The flags in `values.flags`, which joins them by "+": each once, sorted. Refuses what is none.
local function read_flags(where, values)
	local asked, flags = {}, {}
	for flag in (values.flags .. "+"):gmatch("([^+]*)%+") do
		if not has(FLAGS, flag) then
			local text = escape(values.source) .. ":" .. escape(values.destination) .. ":" .. escape(values.flags)
			refuse(where .. "unknown flag " .. show(flag) .. " in " .. show(text) .. "; the flags are "
				.. table.concat(FLAGS, ", "))
		end
		asked[flag] = true
	end
	for _, flag in ipairs(FLAGS) do
		if asked[flag] then flags[#flags + 1] = flag end
	end
	return flags
end

local function check_patterns(where, path)
	local i = 1
	while true do
		local at = path:find("%", i, true)
		if not at then return end
		local width = at < #path and character(path, at + 1) or 0
		local letter = path:sub(at + 1, at + width)
		if letter == "" or not ("jxuAa%"):find(letter, 1, true) then
			refuse(where .. show("%" .. letter) .. " in " .. show(path) .. " means nothing; use %j %u %x %A %a, "
				.. "and %% for a percent sign")
		end
		i = at + 1 + width
	end
end

-- Refuses what no file system can have, whatever the patterns in it stand for, which may be nothing.
local function check_lengths(where, path)
	local function length(text)
		return #text:gsub("%%(.)", { j = "", u = "", x = "", A = "", a = "", ["%"] = "%" })
	end
	if length(path) > LONGEST_PATH then
		refuse(where .. show(path) .. " is no path: it has more than " .. LONGEST_PATH .. " bytes; shorten it")
	end
	for part in path:gmatch("[^/]+") do
		if length(part) > LONGEST_NAME then
			refuse(where .. show(part) .. " in " .. show(path) .. " is no name for a file: it has more than "
				.. LONGEST_NAME .. " bytes; shorten it")
		end
	end
end

local function check_stage(directive, words)
	local where = DIRECTIVE .. " " .. directive .. ": "
	local values = {}
	for _, word in ipairs(words) do
		local name, value = partition(word)
		if not has(STAGE_KEYS, name) then
			refuse(where .. "unknown key " .. show(name) .. "; the keys are " .. table.concat(STAGE_KEYS, ", ")
				.. ", and a blank within a path is written '\\ '")
		end
		if not value then
			refuse(where .. name .. " has no value; write " .. name .. "=…")
		end
		values[name] = value
	end
	if values.type and values.type ~= "directory" and values.type ~= "file" then
		refuse(where .. "type=" .. show(values.type) .. " is not offered; write directory or file, and one line for each")
	end
	for _, name in ipairs({ "source", "destination" }) do
		if not values[name] then refuse(where .. "no " .. name .. "; write " .. name .. "=PATH") end
	end
	local outer, inner = "source", "destination"
	if directive == "stage_out" then outer, inner = inner, outer end
	values[inner] = below(values[inner])
	local flags = values.flags and read_flags(where, values) or {}
	check_replaced(where, values.source)
	check_replaced(where, values.destination)
	local outside, inside = values[outer], values[inner]
	check_patterns(where, outside)
	check_patterns(where, inside)
	if outside:sub(1, 1) ~= "/" then
		refuse(where .. show(outside) .. " is not an absolute path; global storage is named from '/'")
	end
	if inside == "" then
		refuse(where .. "the path within $BEEOND is empty; write '.' for the whole file system")
	elseif inside:sub(1, 1) == "/" then
		refuse(where .. show(inside) .. " must be relative to $BEEOND, without a leading '/'")
	elseif climbs(inside) then
		refuse(where .. show(inside) .. " climbs out of $BEEOND with '..'; name a path below it")
	end
	check_lengths(where, values.source)
	check_lengths(where, values.destination)
	return {
		destination = values.destination, deletes = has(flags, "delete"),
		text = escape(values.source) .. ":" .. escape(values.destination) .. ":" .. table.concat(flags, "+"),
	}
end

-- The names that `path` leads through: what is below it begins with the same.
local function place(path)
	local found = {}
	for part in path:gmatch("[^/]+") do
		if part == ".." then
			table.remove(found)
		elseif part ~= "." then
			found[#found + 1] = part .. "/"
		end
	end
	return "/" .. table.concat(found)
end

-- Refuses a transfer with the flag `delete` that would delete what another one of the same direction copies.
local function check_deletions(transfers)
	if #transfers > MOST_TRANSFERS then refuse("more than " .. MOST_TRANSFERS .. " transfers; " .. DIRECTORIES) end
	for _, each in ipairs(transfers) do
		each.place = place(each.destination)
	end
	for _, deleting in ipairs(transfers) do
		if deleting.deletes then
			local top = deleting.place
			for _, other in ipairs(transfers) do
				if other.place:sub(1, #top) == top and other.text ~= deleting.text then
					refuse("delete at " .. show(deleting.destination) .. " would delete what another transfer copies to "
						.. show(other.destination) .. "; take the flag away, or name another place")
				end
			end
		end
	end
end

-- Checks one directive, adds what it asks for to `asked`, and returns its name. Raises a refusal.
local function check_line(line, asked)
	local words = split_words(line:sub(#DIRECTIVE + 1))
	local name = table.remove(words, 1)
	if not name then
		refuse(DIRECTIVE .. ": the line is empty; the directives are " .. table.concat(DIRECTIVES, ", "))
	elseif name == "beeond" then
		check_beeond(words, asked)
	elseif name == "stage_in" or name == "stage_out" then
		local transfers, made = asked[name] or {}, check_stage(name, words)
		if not transfers[made.text] then transfers[#transfers + 1] = made end
		transfers[made.text] = true
		asked[name] = transfers
	else
		refuse(DIRECTIVE .. ": unknown directive " .. show(name) .. "; the directives are "
			.. table.concat(DIRECTIVES, ", "))
	end
	return name
end

-- The directives at the head of a job's script, as Slurm finds them: up to the first line that is no comment, empty
-- lines skipped, a line that ends in a backslash continued by the next one.
local function directives(script)
	local found, continued, blank = {}, false, false
	for line in script:gmatch("[^\n]+") do
		if line:sub(1, 1) ~= "#" then break end
		if line:sub(1, #DIRECTIVE) ~= DIRECTIVE then
			continued = false
		else
			local text = line
			if continued then
				text = line:sub(#DIRECTIVE + 1)
				if blank then text = text:gsub("^%s+", "") end
			else
				found[#found + 1] = {}
			end
			continued = text:sub(-1) == "\\"
			if continued then
				blank = text:sub(-2, -2):match("%s") ~= nil
				text = text:sub(1, -2)
			end
			table.insert(found[#found], text)
		end
	end
	for i, pieces in ipairs(found) do
		found[i] = table.concat(pieces)
	end
	return found
end

-- The site's limits. -----------------------------------------------------------------------------------------------

-- The file of limits (beeond_ctl/limits.py says what is in it). Without it the site has none, and Prologs find out; so
-- they do where lines make no rule. The first of those is `wrong`.
local function read_limits(text)
	local limits, found = { rules = {} }, {}
	for line in (text or ""):gmatch("[^\n]+") do
		local name, rest = line:match("^([%l-]+) (.*)$")
		local last = found[#found]
		if name == "offer" then
			local offered = split_words(rest)
			found[#found + 1] = { line = line, key = table.remove(offered, 1), offered = offered }
		elseif name == "told" and last and last.key and not last.told then
			last.told = rest
		elseif name == "told" or name == "refuse" then
			local backend, keys, told = line:match("^refuse (%S+) (%S+) (.*)$")
			found[#found + 1] = { line = line, backend = backend, keys = keys, told = told }
		end
	end
	for _, rule in ipairs(found) do
		if rule.told then
			limits.rules[#limits.rules + 1] = rule
		else
			limits.wrong = limits.wrong or rule.line
		end
	end
	return limits
end

local NO = { no = true, ["false"] = true, ["0"] = true }

-- Whether all of `keys`, joined by "+", are asked for, and not with "no".
local function all_asked(keys, asked)
	for key in keys:gmatch("[^+]+") do
		if asked[key] == nil or (METAVAR[key] == "yes|no" and NO[asked[key]]) then return false end
	end
	return true
end

-- The first of the values of `key` that the site does not offer.
local function not_offered(rule, value)
	local values = value
	if rule.key == "mount" then values = values:match("^.*[^/]") or "/" end
	if rule.key ~= "interfaces" then return not has(rule.offered, values) and values or nil end
	for part in values:gmatch("[^+]+") do
		if not has(rule.offered, part) then return part end
	end
end

-- Refuses what the site does not offer: the rules were made by trying `plan.check_request`, and have its words.
local function check_limits(limits, asked)
	local where = DIRECTIVE .. " beeond: "
	for _, rule in ipairs(limits.rules) do
		local told = rule.told
		if rule.key then
			local bad = asked[rule.key] and not_offered(rule, asked[rule.key])
			if bad then
				local whole = rule.key == "mount" and bad or asked[rule.key]
				refuse(where .. told:gsub("{(.-)}", { value = shortened(whole), part = bad }))
			end
		elseif rule.backend == (asked.backend or "-") and all_asked(rule.keys, asked) then
			refuse(where .. told)
		end
	end
	if asked.capacity and limits.pool then
		local all = size(limits.pool)
		if all and size(asked.capacity) > all then
			refuse(where .. "capacity=" .. shortened(asked.capacity) .. " is more than all nodes have together, which is "
				.. limits.pool .. "; ask for less")
		end
	end
end

-- Refuses what stands beside `join`.
local function check_join(asked)
	for key in pairs(asked) do
		if asked.join and key ~= "join" then
			refuse("join=" .. asked.join .. " stands alone: component " .. asked.join
				.. ", whose file system it is, says all else")
		end
	end
end

-- What is wrong with a job's script, nil where nothing is; and the names of its directives.
local function check_script(script, limits)
	local names, asked, length = {}, {}, 0
	local fine, answer = pcall(function()
		local lines = directives(script)
		for _, line in ipairs(lines) do
			length = length + #line
		end
		if length > MOST_BYTES then refuse(DIRECTIVE .. ": the directives are too long; " .. DIRECTORIES) end
		for _, line in ipairs(lines) do
			names[check_line(line, asked)] = true
		end
		check_join(asked)
		check_deletions(asked.stage_in or {})
		check_deletions(asked.stage_out or {})
		check_limits(limits or { rules = {} }, asked)
	end)
	if fine then return nil, names end
	if type(answer) == "table" then return answer.refusal, names end
	return "burst_buffer.lua: " .. tostring(answer) .. "; this is for the cluster's administrator to mend", names
end

return { check_script = check_script, directives = directives, read_limits = read_limits, size = size }
