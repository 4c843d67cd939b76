"""Hand settings.ini (nbdev's one source of metadata) to setuptools."""
import shlex
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]


def words(key: str) -> list[str]:
    return shlex.split(cfg.get(key, ""))


STATUS = {"1": "Planning", "2": "Pre-Alpha", "3": "Alpha", "4": "Beta", "5": "Production/Stable"}
lib = cfg["lib_path"]
rec, llm, nb, cluster, dev = (words(f"{extra}_requirements") for extra in ("rec", "llm", "nb", "cluster", "dev"))
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license={"apache2": "Apache-2.0", "mit": "MIT"}[cfg["license"]],
    keywords=cfg["keywords"].split(),
    classifiers=[
        f"Development Status :: {cfg['status']} - {STATUS[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Programming Language :: Python :: 3",
    ],
    project_urls={
        "Documentation": f"{cfg['doc_host']}{cfg['doc_baseurl']}/",
        "Source": cfg["git_url"],
        "Changelog": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md",
    },
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[lib, f"{lib}.*"]),
    include_package_data=True,
    install_requires=words("requirements"),
    extras_require={"rec": rec, "llm": llm, "nb": nb, "cluster": nb + cluster, "dev": rec + llm + nb + dev},
    entry_points={
        "console_scripts": words("console_scripts"),
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
    zip_safe=False,
)
