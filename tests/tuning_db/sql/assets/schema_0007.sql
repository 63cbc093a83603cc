-- A database of schema 0007, as SQL: that of 0006 upgraded; records and job name their code, the gate its baseline.
BEGIN TRANSACTION;
CREATE TABLE artifacts (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	model TEXT NOT NULL, 
	model_sha256 VARCHAR(64) NOT NULL, 
	target_id INTEGER NOT NULL, 
	job_id VARCHAR(64), 
	location TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	manifest TEXT NOT NULL, 
	CONSTRAINT pk_artifacts PRIMARY KEY (id), 
	CONSTRAINT fk_artifacts_target_id_targets FOREIGN KEY(target_id) REFERENCES targets (id), 
	CONSTRAINT fk_artifacts_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_artifacts_key UNIQUE ("key")
);
INSERT INTO "artifacts" VALUES(1,'02917a02a8a80ee92877be82bb29bb1bd789f0a8cc5a8d18c9872d21bf472e23','bert-base','0000000000000000000000000000000000000000000000000000000000000000',1,'29d08dc5-34e7-44c9-8327-93e4ac6ea221','out/bert','2026-11-20 13:00:00.000000','{"kernels":[]}');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	cell_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	host TEXT NOT NULL, 
	pid BIGINT NOT NULL, 
	started_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	state VARCHAR(16) NOT NULL, 
	error TEXT, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_cell_id_cells FOREIGN KEY(cell_id) REFERENCES cells (id), 
	CONSTRAINT uq_attempts_cell_id_number UNIQUE (cell_id, number)
);
INSERT INTO "attempts" VALUES(1,1,1,'far-host',7,'2026-11-22 12:00:01.000000','2026-11-22 12:00:08.000000','2026-11-22 12:00:08.000000','done',NULL);
INSERT INTO "attempts" VALUES(2,2,1,'far-host',7,'2026-11-22 12:00:01.000000','2026-11-22 12:00:09.000000',NULL,'tuning',NULL);
CREATE TABLE batches (
	id VARCHAR(64) NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	path TEXT NOT NULL, 
	host TEXT NOT NULL, 
	pid BIGINT NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	outcome TEXT, 
	"plan" TEXT NOT NULL, 
	CONSTRAINT pk_batches PRIMARY KEY (id)
);
INSERT INTO "batches" VALUES('b0000000-0000-0000-0000-000000000001','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','night','/plans/night.toml','far-host',7,'2026-11-22 12:00:09.000000','2026-11-22 12:00:00.000000',NULL,NULL,'[[cells]]');
CREATE TABLE benchmarks (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	artifact_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	arm VARCHAR(64) NOT NULL, 
	latency_us DOUBLE, 
	latency_kind VARCHAR(16) NOT NULL, 
	latencies TEXT NOT NULL, 
	conditions TEXT NOT NULL, 
	CONSTRAINT pk_benchmarks PRIMARY KEY (id), 
	CONSTRAINT fk_benchmarks_artifact_id_artifacts FOREIGN KEY(artifact_id) REFERENCES artifacts (id), 
	CONSTRAINT fk_benchmarks_environment_id_environments FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT uq_benchmarks_key UNIQUE ("key")
);
INSERT INTO "benchmarks" VALUES(1,'6b0bb6b861542b1fb67b04808224645cd566818a7cf3ddc9696a3d0b67c1d36e',1,1,'2026-11-20 13:00:00.000000','ort',8.5,'finite','[9.0,8.0]','{}');
CREATE TABLE cells (
	id INTEGER NOT NULL, 
	batch_id VARCHAR(64) NOT NULL, 
	position INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	source TEXT NOT NULL, 
	shape TEXT NOT NULL, 
	buckets TEXT NOT NULL, 
	precision VARCHAR(16) NOT NULL, 
	effort VARCHAR(16) NOT NULL, 
	target TEXT NOT NULL, 
	importance INTEGER NOT NULL, 
	tags TEXT NOT NULL, 
	max_latency_ms DOUBLE, 
	rtol DOUBLE, 
	atol DOUBLE, 
	state VARCHAR(16) NOT NULL, 
	updated_at DATETIME NOT NULL, 
	error TEXT, 
	model TEXT, 
	artifact TEXT, 
	artifact_key VARCHAR(64), 
	size_bytes BIGINT, 
	validated BOOLEAN, 
	untuned_ms DOUBLE, 
	shipped_ms DOUBLE, 
	peer VARCHAR(64), 
	peer_ms DOUBLE, 
	seconds DOUBLE, 
	job_id VARCHAR(64), 
	CONSTRAINT pk_cells PRIMARY KEY (id), 
	CONSTRAINT fk_cells_batch_id_batches FOREIGN KEY(batch_id) REFERENCES batches (id), 
	CONSTRAINT fk_cells_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_cells_batch_id_name UNIQUE (batch_id, name)
);
INSERT INTO "cells" VALUES(1,'b0000000-0000-0000-0000-000000000001',0,'bert','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','bert.onnx','ids=1x8','','fp16','quick','llvm',3,'kept',2.5,NULL,NULL,'done','2026-11-22 12:00:08.000000',NULL,NULL,'/out/bert','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',4096,1,2.0,1.25,NULL,NULL,NULL,'29d08dc5-34e7-44c9-8327-93e4ac6ea221');
INSERT INTO "cells" VALUES(2,'b0000000-0000-0000-0000-000000000001',1,'gpt','gggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggg','gpt.onnx','ids=1x8','','fp16','quick','llvm',3,'kept',2.5,NULL,NULL,'tuning','2026-11-22 12:00:08.000000',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE environments (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	device_kind VARCHAR(32) NOT NULL, 
	device_name TEXT NOT NULL, 
	arch VARCHAR(64) NOT NULL, 
	driver VARCHAR(64), 
	cuda VARCHAR(64), 
	tvm_version VARCHAR(64) NOT NULL, 
	tvm_ffi_version VARCHAR(64) NOT NULL, 
	cores INTEGER, schedules_version VARCHAR(64), 
	CONSTRAINT pk_environments PRIMARY KEY (id), 
	CONSTRAINT uq_environments_key UNIQUE ("key")
);
INSERT INTO "environments" VALUES(1,'f62a77be7d03f86395322b42e3b47648615117f72ed80dfb9af1ddad5a61426e','cpu','EPYC 9654','znver4',NULL,NULL,'0.27.0.post1','0.1.14.post1',2,NULL);
INSERT INTO "environments" VALUES(2,'2dc2c0b0037259c1b5bfbee906756d002af66e09b6d48937c32f37d0cfd3e440','cuda','NVIDIA H200','sm_90a','580.1','13.0','0.27.0.post1','0.1.14.post1',2,NULL);
CREATE TABLE features (
	record_id INTEGER NOT NULL, 
	version VARCHAR(128) NOT NULL, 
	rows INTEGER NOT NULL, 
	columns INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_features PRIMARY KEY (record_id, version), 
	CONSTRAINT fk_features_record_id_records FOREIGN KEY(record_id) REFERENCES records (id) ON DELETE CASCADE
);
INSERT INTO "features" VALUES(1,'per-store/2',2,2,X'789C63603860CF00010E40E400000FC301C0');
CREATE TABLE gates (
	id VARCHAR(64) NOT NULL, 
	artifact_id INTEGER NOT NULL, 
	baseline_id INTEGER, 
	passed BOOLEAN NOT NULL, 
	"by" TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	report TEXT NOT NULL, 
	CONSTRAINT pk_gates PRIMARY KEY (id), 
	CONSTRAINT fk_gates_artifact_id_artifacts FOREIGN KEY(artifact_id) REFERENCES artifacts (id), 
	CONSTRAINT fk_gates_baseline_id_artifacts FOREIGN KEY(baseline_id) REFERENCES artifacts (id)
);
INSERT INTO "gates" VALUES('b7fa9c8f-3afa-4ac7-a076-948c725d1ab3',1,1,1,'ben@far-host','2026-11-22 12:01:00.000000','{"passed":true}');
CREATE TABLE job_tasks (
	id INTEGER NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	workload_id INTEGER NOT NULL, 
	weight INTEGER NOT NULL, 
	onnx_nodes TEXT NOT NULL, 
	seconds DOUBLE NOT NULL, 
	CONSTRAINT pk_job_tasks PRIMARY KEY (id), 
	CONSTRAINT fk_job_tasks_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT fk_job_tasks_workload_id_workloads FOREIGN KEY(workload_id) REFERENCES workloads (id), 
	CONSTRAINT uq_job_tasks_job_id_workload_id UNIQUE (job_id, workload_id)
);
INSERT INTO "job_tasks" VALUES(1,'29d08dc5-34e7-44c9-8327-93e4ac6ea221',1,12,'["/layer.0/MatMul"]',1.5);
CREATE TABLE jobs (
	id VARCHAR(64) NOT NULL, 
	model TEXT NOT NULL, 
	model_sha256 VARCHAR(64) NOT NULL, 
	target_id INTEGER NOT NULL, 
	options TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	outcome TEXT, code_version TEXT, 
	CONSTRAINT pk_jobs PRIMARY KEY (id), 
	CONSTRAINT fk_jobs_target_id_targets FOREIGN KEY(target_id) REFERENCES targets (id)
);
INSERT INTO "jobs" VALUES('29d08dc5-34e7-44c9-8327-93e4ac6ea221','bert-base','0000000000000000000000000000000000000000000000000000000000000000',1,'{"trials":2}','2026-11-20 10:44:12.907856','2026-11-20 10:44:12.922197','ok','0.1.0+g0123456789ab');
CREATE TABLE "records" (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	workload_id INTEGER NOT NULL, 
	signature_id INTEGER NOT NULL, 
	target_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	job_id VARCHAR(64), 
	route VARCHAR(16) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	latency_us DOUBLE, 
	latency_kind VARCHAR(16) NOT NULL, 
	latencies TEXT NOT NULL, 
	registers INTEGER, 
	smem_bytes BIGINT, 
	spill_bytes BIGINT, 
	seed BIGINT, 
	duration_s DOUBLE NOT NULL, 
	created_at DATETIME NOT NULL, 
	error TEXT, 
	decision TEXT NOT NULL, kernel_hash VARCHAR(16), code_version TEXT, 
	CONSTRAINT pk_records PRIMARY KEY (id), 
	CONSTRAINT fk_records_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT fk_records_signature_id_signatures FOREIGN KEY(signature_id) REFERENCES signatures (id), 
	CONSTRAINT fk_records_workload_id_workloads FOREIGN KEY(workload_id) REFERENCES workloads (id), 
	CONSTRAINT fk_records_environment_id_environments FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT fk_records_target_id_targets FOREIGN KEY(target_id) REFERENCES targets (id), 
	CONSTRAINT uq_records_created_at_key UNIQUE (created_at, "key")
);
INSERT INTO "records" VALUES(1,'2024b7251ab011ab6a4762fecdd94bed60f5727e4fb11a66311124edd2e5a963',1,1,1,1,'29d08dc5-34e7-44c9-8327-93e4ac6ea221','metaschedule','ok',12.5,'finite','[12.5,11.5,13.5]',NULL,NULL,NULL,7,0.25,'2026-11-20 12:00:00.000001',NULL,'[[],[]]',NULL,'0.1.0+g0123456789ab');
INSERT INTO "records" VALUES(2,'0ae7ded8dc1d71712a35fd883719a71bff2f4714c3b84784bfdb56c8a7bb6f46',1,1,2,2,NULL,'metaschedule','run_error',NULL,'nan','["nan","inf","-inf"]',255,232448,16,NULL,0.25,'2026-11-20 12:00:00.000001','CUDA_ERROR_ILLEGAL_ADDRESS','[[],[]]',NULL,'0.1.0+g0123456789ab');
CREATE TABLE relaxtune_schema_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT relaxtune_schema_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "relaxtune_schema_version" VALUES('0007');
CREATE TABLE signatures (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	family VARCHAR(64) NOT NULL, 
	signature TEXT NOT NULL, 
	CONSTRAINT pk_signatures PRIMARY KEY (id), 
	CONSTRAINT uq_signatures_key UNIQUE ("key")
);
INSERT INTO "signatures" VALUES(1,'067019ac334b9099da2842c195978abea4ccaf6c0a224b792a39fdbd84cea7b2','matmul','{"dims":[1,64,64],"dtypes":["float32"],"epilogue":[],"family":"matmul"}');
CREATE TABLE tag_moves (
	id VARCHAR(64) NOT NULL, 
	tag VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	artifact_id INTEGER, 
	"by" TEXT NOT NULL, 
	why TEXT NOT NULL, 
	gate TEXT, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_tag_moves PRIMARY KEY (id), 
	CONSTRAINT fk_tag_moves_artifact_id_artifacts FOREIGN KEY(artifact_id) REFERENCES artifacts (id), 
	CONSTRAINT uq_tag_moves_tag_number UNIQUE (tag, number)
);
INSERT INTO "tag_moves" VALUES('22bd8068-d2cf-4b30-aa73-eebc0d02d62c','prod',1,'tag',1,'ann@far-host','first',NULL,'2026-11-22 12:00:00.000000');
INSERT INTO "tag_moves" VALUES('b7fa9c8f-3afa-4ac7-a076-948c725d1ab3','prod',2,'promote',1,'ben@far-host','faster','{"passed":true}','2026-11-22 12:01:00.000000');
INSERT INTO "tag_moves" VALUES('dfed0a98-48a1-42f3-aab9-88d210ffddbc','prod',3,'rollback',1,'ann@far-host','slower after all',NULL,'2026-11-22 12:02:00.000000');
CREATE TABLE targets (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	arch VARCHAR(64) NOT NULL, 
	attributes TEXT NOT NULL, 
	CONSTRAINT pk_targets PRIMARY KEY (id), 
	CONSTRAINT uq_targets_key UNIQUE ("key")
);
INSERT INTO "targets" VALUES(1,'308a78a2bd584cbe762b0e02e6d2e0e50a07b6dc7e08ef34192c80a97e147bb0','llvm','znver4','{}');
INSERT INTO "targets" VALUES(2,'9838f0b4d9ca228178f911b088990b14860a8b4bf14ab31841b758b8626af7da','cuda','sm_90a','{}');
CREATE TABLE validations (
	id INTEGER NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	artifact_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	passed BOOLEAN NOT NULL, 
	samples INTEGER NOT NULL, 
	max_abs DOUBLE, 
	max_abs_kind VARCHAR(16) NOT NULL, 
	report TEXT NOT NULL, 
	CONSTRAINT pk_validations PRIMARY KEY (id), 
	CONSTRAINT fk_validations_artifact_id_artifacts FOREIGN KEY(artifact_id) REFERENCES artifacts (id), 
	CONSTRAINT fk_validations_environment_id_environments FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT uq_validations_key UNIQUE ("key")
);
INSERT INTO "validations" VALUES(1,'aaeb7e92b199da7a662c3dcac4616e8d10b9fe83f4818a7ef4b4da1b37c3fd2a',1,1,'2026-11-20 13:00:00.000000',0,3,NULL,'inf','{}');
CREATE TABLE workloads (
	id INTEGER NOT NULL, 
	workload_hash VARCHAR(128) NOT NULL, 
	tvm_version VARCHAR(64) NOT NULL, 
	signature_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	flops DOUBLE NOT NULL, 
	bytes DOUBLE NOT NULL, 
	created_at DATETIME NOT NULL, 
	ir_json TEXT, 
	CONSTRAINT pk_workloads PRIMARY KEY (id), 
	CONSTRAINT fk_workloads_signature_id_signatures FOREIGN KEY(signature_id) REFERENCES signatures (id), 
	CONSTRAINT uq_workloads_workload_hash_tvm_version UNIQUE (workload_hash, tvm_version)
);
INSERT INTO "workloads" VALUES(1,'hash1','0.27.0.post1',1,'matmul1',524288.0,49152.0,'2026-11-20 10:44:12.903978','{"ir":1}');
CREATE INDEX ix_signatures_family ON signatures (family);
CREATE INDEX ix_targets_kind_arch ON targets (kind, arch);
CREATE INDEX ix_jobs_model ON jobs (model);
CREATE INDEX ix_jobs_model_sha256 ON jobs (model_sha256);
CREATE INDEX ix_jobs_started_at ON jobs (started_at);
CREATE INDEX ix_workloads_signature_id ON workloads (signature_id);
CREATE INDEX ix_job_tasks_workload_id ON job_tasks (workload_id);
CREATE INDEX ix_records_job_id ON records (job_id);
CREATE INDEX ix_records_by_workload ON records (workload_id, status, target_id, latency_us, route, environment_id);
CREATE INDEX ix_records_by_signature ON records (signature_id, status, target_id, latency_us, route, environment_id) WHERE route IN ('template', 'library');
CREATE INDEX ix_records_status_created_at ON records (status, created_at);
CREATE INDEX ix_artifacts_model ON artifacts (model);
CREATE INDEX ix_artifacts_model_sha256 ON artifacts (model_sha256);
CREATE INDEX ix_artifacts_job_id ON artifacts (job_id);
CREATE INDEX ix_artifacts_created_at ON artifacts (created_at);
CREATE INDEX ix_validations_artifact_id ON validations (artifact_id);
CREATE INDEX ix_validations_created_at ON validations (created_at);
CREATE INDEX ix_benchmarks_artifact_id ON benchmarks (artifact_id);
CREATE INDEX ix_benchmarks_created_at ON benchmarks (created_at);
CREATE INDEX ix_batches_key ON batches ("key");
CREATE INDEX ix_batches_started_at ON batches (started_at);
CREATE UNIQUE INDEX uq_batches_open ON batches ("key") WHERE finished_at IS NULL;
CREATE INDEX ix_cells_key_state ON cells ("key", state);
CREATE INDEX ix_cells_job_id ON cells (job_id);
CREATE INDEX ix_tag_moves_artifact_id ON tag_moves (artifact_id);
CREATE INDEX ix_gates_artifact_id ON gates (artifact_id);
CREATE INDEX ix_gates_baseline_id ON gates (baseline_id);
CREATE INDEX ix_gates_created_at ON gates (created_at);
COMMIT;
