import subprocess, tempfile, time, shutil, sys
from pathlib import Path
import pytest, sqlalchemy as sa
from tests.hpo import test_storage_contract as c
from tests.hpo.test_storage import *
from hpo.storage import open_storage
@pytest.fixture(scope="session")
def maria():
    M=Path(tempfile.mkdtemp(prefix="maria-")); shutil.chown(M,"mysql","mysql")
    subprocess.run(["mariadb-install-db","--no-defaults","--user=mysql",f"--datadir={M}","--auth-root-authentication-method=normal","--skip-test-db"],check=True,stdout=subprocess.DEVNULL)
    p=subprocess.Popen(["mariadbd","--no-defaults","--user=mysql",f"--datadir={M}",f"--socket={M}/s.sock","--skip-networking"],stdout=subprocess.DEVNULL,stderr=subprocess.DEVNULL)
    for _ in range(100):
        if (M/"s.sock").exists(): break
        time.sleep(.1)
    time.sleep(.5)
    yield M
    p.terminate(); p.wait(); shutil.rmtree(M)
N=iter(range(1000))
def new(M):
    n=f"db{next(N)}"
    e=sa.create_engine(f"mysql+pymysql://root@localhost/?unix_socket={M}/s.sock")
    with e.begin() as conn: conn.exec_driver_sql(f"CREATE DATABASE {n}")
    e.dispose()
    return f"mysql://root@localhost/{n}?unix_socket={M}/s.sock"
@pytest.fixture
def ready_url(maria): return new(maria)
@pytest.fixture
def database_url(maria): return new(maria)
@pytest.fixture(scope="module")
def ms(maria):
    s=open_storage(new(maria),create=True); yield s; s.close()
class TestMaria(c.Contract):
    @pytest.fixture
    def storage(self, ms):
        c.empty(ms); return ms
