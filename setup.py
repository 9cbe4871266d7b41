"""Everything else is in pyproject.toml, which has no way to add one package from elsewhere to those that are found."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["specbatch*"]), "specbatch.configs"],
    package_dir={"specbatch.configs": "configs"},
)
