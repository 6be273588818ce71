//! Certificates of a private CA, in files: for a server at `localhost` and 127.0.0.1, and for a
//! client.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    pub fn new() -> Self {
        Self::with(|_| ())
    }

    /// Changes the certificate of the server before the CA signs it.
    pub fn with(change: impl Fn(&mut CertificateParams)) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the certificates");
        let write = |name: &str, pem: String| fs::write(folder.path().join(name), pem).unwrap();
        let mut params = CertificateParams::default();
        // A certificate with the name of its issuer would count as self-signed.
        params.distinguished_name.push(DnType::CommonName, "CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        write("ca.pem", params.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(params, key);
        for (name, hosts) in [("server", &["localhost", "127.0.0.1"][..]), ("client", &["client"])]
        {
            let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(hosts).unwrap();
            if name == "server" {
                change(&mut params);
            }
            let certificate = params.signed_by(&key, &issuer).unwrap();
            write(&format!("{name}.pem"), certificate.pem());
            write(&format!("{name}.key"), key.serialize_pem());
        }
        Self { folder }
    }

    /// The certificate of the server is signed by itself.
    pub fn self_signed(is_ca: IsCa) -> Self {
        let this = Self::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.is_ca = is_ca;
        fs::write(this.path("server.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(this.path("server.key"), key.serialize_pem()).unwrap();
        this
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect("the certificate is there")
    }

    /// The settings of a server with TLS, except its port. It accepts only clients with a
    /// certificate.
    pub fn settings(&self) -> [(&'static str, String); 4] {
        [
            ("tls-ca-cert-file", self.path("ca.pem")),
            ("tls-cert-file", self.path("server.pem")),
            ("tls-key-file", self.path("server.key")),
            ("tls-replication", "yes".to_owned()),
        ]
    }
}
