"""The one part that is compiled. Without a compiler, Python's headers or libxxhash's, the package does without it."""

from setuptools import Extension, setup

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wformat=2", "-Wstrict-prototypes", "-Wundef", "-Wvla"]
HARDENING = [
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-fstack-protector-strong",
    "-fstack-clash-protection",
]

setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "beeond_ctl.staging._native",
            ["beeond_ctl/staging/_native.c"],
            define_macros=[
                ("_GNU_SOURCE", None),
                ("_FILE_OFFSET_BITS", "64"),
                ("Py_LIMITED_API", "0x030B0000"),
            ],
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", *WARNINGS, *HARDENING],
            extra_link_args=["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
